"""From YAML and command line to checked objects."""
