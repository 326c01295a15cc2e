"""Program of every rank: reads the spec, loads data and model, trains and publishes the result."""
