"""Beginnings of texts of several kinds, to measure on where nobody has given any."""

PROMPTS: tuple[str, ...] = (
    "def read_lines(path, encoding='utf-8'):\n"
    '    """Return the lines of a file without their line ends."""\n',
    "import os\nimport sys\n\n\nclass Counter:\n    def __init__(self, start=0):\n",
    "Question: Why do leaves change their colour in autumn?\nAnswer:",
    "The harbour was quiet that morning. Two boats had come in during the night, and",
    "Dear Ms Keller,\n\nthank you for your letter of the third of May. We have looked into",
    "# Installation\n\nYou need Python 3.10 or newer. First create a virtual environment:\n\n",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41,',
    "A short history of the bicycle\n\nThe first machines with two wheels in a line",
)
