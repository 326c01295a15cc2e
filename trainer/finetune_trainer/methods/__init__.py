"""One module per training method."""
