"""Routers compared on a real Ray Serve cluster: ``python -m loadtest.fleet``. docs/routing.md has what it gave."""
