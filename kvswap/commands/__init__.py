"""The subcommands of kvswap, a module each: ``add`` gives the parser its arguments, the function that it names runs it.

``parser`` holds the parser, the exit statuses and the options that subcommands share, ``output`` writes for people and
for scripts.
"""
