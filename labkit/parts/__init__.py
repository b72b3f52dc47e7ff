"""What the algorithms stand on, one idea a file; the map is in labkit/__init__.py."""
