"""For the tests of this folder: random numbers that are a test's own, and failed assertions of helpers shown in full."""

import zlib

import pytest

pytest.register_assert_rewrite("flash_reference")


@pytest.fixture(autouse=True)
def seed_by_name(request):
    torch = pytest.importorskip("torch")
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
