"""One module per training method, with its loss."""
