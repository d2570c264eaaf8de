"""kvswap bench: how fast blocks move, by which way, at what cost to the caller and to a model beside; bytes verified.

``shapes`` says what is moved and ``methods`` how: kvswap's paths, and what others do by hand. ``measure`` times one
method, ``beside`` times a load that runs beside one, ``regret`` looks at what path ``auto`` picks, ``table`` puts the
cases together. Each gives rows; ``report`` shows them and ``plot`` draws them.
"""
