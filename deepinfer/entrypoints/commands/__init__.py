"""One module per command of the ``deepinfer`` program."""
