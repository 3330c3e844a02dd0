"""One contender a file; `find_contenders` imports them all."""
