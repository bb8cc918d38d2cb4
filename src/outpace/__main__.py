"""`python -m outpace`."""

from .cli.main import main

main()
