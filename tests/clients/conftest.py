"""What several of the checks need."""

import os
import subprocess

import pytest


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A folder with the tokenizer in Hugging Face's form, as `ridgeline export` writes it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run(
        [os.environ["RIDGELINE"], "export", "tokenizer", os.environ["RIDGELINE_MODEL"], folder],
        check=True,
        env=os.environ | {"HOME": os.environ["RIDGELINE_USER_HOME"]},
    )
    return folder
