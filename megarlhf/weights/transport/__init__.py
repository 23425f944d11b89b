"""How elements move: inside a rank, between ranks, from files to files."""
