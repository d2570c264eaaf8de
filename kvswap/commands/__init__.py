"""The subcommands of kvswap, a module each: ``add`` adds its arguments and names the function that runs it.

``parser`` holds the parser, the exit statuses and the options that subcommands share, ``output`` writes for people and
for scripts.
"""
