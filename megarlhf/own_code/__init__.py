"""Code of the user that a configuration names by import path, `package.module:name`. Standard library only."""
