import pytest

pytest.register_assert_rewrite("tests.transfer.connector_contract")
