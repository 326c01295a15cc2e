// CoreDNS with the plugins that the cluster's Corefile names, and no others.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

// The order in which plugins see a query; it replaces the generated list, which names plugins that are not here.
func init() {
	dnsserver.Directives = []string{"bind", "errors", "ready", "cache", "kubernetes"}
}

func main() { coremain.Run() }
