"""The documentation site: what `make docs` needs besides MkDocs."""
