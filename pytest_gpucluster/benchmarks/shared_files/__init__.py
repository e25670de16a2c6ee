"""Files that every node must see alike: what is mounted, what is seen of another node's writes and renames, and how
fast many small files are."""
