"""The package's version, in one place (read by the build and by `ridethrough --version`)."""

__version__ = "0.1.0.dev0"
