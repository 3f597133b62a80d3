"""Published weights on their way to an engine: fetched in parallel, once a host, ahead of their use."""
