"""The table of planted faults fits the product and the tests; `make mutants` plants them."""

import mutants
import pytest

pytestmark = pytest.mark.check


def test_the_planted_faults_fit_the_code():
    faults = mutants.read_faults()
    assert sum(map(len, faults.values())) > 450 and mutants.problems(faults) == []
