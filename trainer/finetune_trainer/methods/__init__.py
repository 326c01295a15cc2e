"""One module per training method, each with its loss and its rows."""
