"""The HTTP server: uvicorn's protocol with limits, what accepts connections, and the listening socket."""
