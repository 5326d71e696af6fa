import pytest

from gspo.errors import InputError
from gspo.sandbox import open_sandbox


@pytest.fixture(scope="session")
def sandbox():
    """The best isolation of this machine."""
    try:
        return open_sandbox("auto", num_slots=2)
    except InputError as error:
        pytest.skip(str(error))
