"""Models that see: what their parts are called, how an image is written and processed, which parts are trained."""
