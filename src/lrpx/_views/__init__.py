"""Pictures of an attribution: in a terminal, on a page, in a notebook."""
