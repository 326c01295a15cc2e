"""Work queue, fair limits and error handling of the asynchronous tasks of the operator."""
