"""HTTP: llama-server's endpoints over the engine. `app.build_app` makes the ASGI app, `run.serve` runs it."""
