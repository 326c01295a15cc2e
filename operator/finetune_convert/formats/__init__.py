"""Converts the options and configs of each supported tool."""
