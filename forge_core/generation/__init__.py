"""Sampling engines: requests in, completions with the sampler's log-probabilities out."""
