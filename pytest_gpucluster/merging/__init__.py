"""Journals of several runs become one journal with one verdict. Pure but for reading files."""
