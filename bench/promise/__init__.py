"""Does a calibrated exit threshold keep what it promises? ``python -m bench promise --help``. Start with measure.py."""
