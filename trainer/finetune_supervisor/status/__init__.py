"""Status reporting of a node: HTTP server, termination message and progress reports of user commands."""
