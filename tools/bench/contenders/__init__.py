"""One file for each contender; `find_contenders` imports all of them."""
