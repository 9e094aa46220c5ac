"""HTTP: TGI's API and OpenAI's, over hypercorn and quart-trio. The only place that knows HTTP."""
