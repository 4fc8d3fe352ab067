"""The ``kvtier`` command line. Decides nothing but what is printed where and which exit status means what."""
