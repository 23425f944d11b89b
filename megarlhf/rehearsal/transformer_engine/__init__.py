"""Stand-ins for TransformerEngine's modules, with the memory that they take."""
