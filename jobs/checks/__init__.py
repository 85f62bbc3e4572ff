"""The checks of `raytrain check` beyond those before every run."""
