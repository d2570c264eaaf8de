"""Its names."""

HTML = display = None
