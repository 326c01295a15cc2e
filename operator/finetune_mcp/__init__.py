"""MCP server that lets agents read jobs and, if allowed, change them after a preview."""
