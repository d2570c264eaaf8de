"""kvswap bench measures how fast blocks move, and what that costs the caller and a model beside. Bytes are verified.

``shapes`` has what is moved, and ``methods`` how: kvswap's paths, and copies by hand. ``measure`` times one method.
``table`` has the cases of the table, ``beside`` times a load that runs beside copies. Each makes rows, which ``report``
writes.
"""
