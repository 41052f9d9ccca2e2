"""The HTTP server of `specjax serve`, with the endpoints of the OpenAI API."""
