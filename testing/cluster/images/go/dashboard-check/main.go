// Command dashboard-check parses Grafana dashboards strictly: unknown, missing and wrongly typed fields are errors.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	plugins.RegisterDefaultPlugins()
	failed := false
	for _, path := range os.Args[1:] {
		if err := check(path); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}

func check(path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var parsed dashboard.Dashboard
	if err := parsed.UnmarshalJSONStrict(content); !isEmpty(err) {
		return err
	}
	if err := parsed.Validate(); !isEmpty(err) {
		return err
	}
	return nil
}

// isEmpty returns whether there is no problem: the SDK returns an empty list of errors instead of nil.
func isEmpty(err error) bool {
	var problems cog.BuildErrors
	return err == nil || (errors.As(err, &problems) && len(problems) == 0)
}
