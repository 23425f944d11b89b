"""Work of one layer, recorded once and reused for layers like it."""
