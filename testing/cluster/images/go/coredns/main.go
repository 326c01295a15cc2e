// CoreDNS with only the plugins that the cluster's Corefile uses.
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

// Directives sets the plugin order; it replaces the generated list, which contains plugins not linked here.
func init() {
	dnsserver.Directives = []string{"bind", "errors", "ready", "cache", "kubernetes"}
}

func main() { coremain.Run() }
