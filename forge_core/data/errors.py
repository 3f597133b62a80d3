"""The error of everything that reads prompts."""


class DataError(ValueError):
    """A data set cannot be used. The message names the configuration key and says what to do."""
