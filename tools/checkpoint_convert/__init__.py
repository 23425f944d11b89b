"""The checkpoint converter's command line: see `megarlhf/convert.py`."""
