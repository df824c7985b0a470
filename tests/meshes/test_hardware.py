import pytest

from jrlhf.meshes.hardware import HARDWARE, PEAKS, cluster


def test_names_of_clusters():
    assert cluster("16xh100").hardware is HARDWARE["h100"]
    assert (cluster("16xh100").devices, cluster("16xh100").node) == (16, 8)
    assert (cluster("4xH200").devices, cluster("4xH200").node) == (4, 4)
    assert cluster("v5p-512").devices == 256  # a v5p's two cores are one device
    assert cluster("v5litepod-16") == cluster("v5e-16")
    assert (cluster("v6e-8").devices, cluster("v6e-8").node) == (8, 8)


def test_clusters_that_do_not_exist():
    for text, nearest in [
        ("12xh100", "the nearest is 16xh100"),
        ("3xh200", "the nearest is 4xh200"),
        ("0xb200", "the nearest is 1xb200"),
        ("1000000000xh100", "nodes of 8 up to 16384, the nearest is 16384xh100"),
        ("8xh300", "the nearest is 8xh200"),
        ("v5p-500", "the nearest is v5p-512"),
        ("v5p-8192000", "the nearest is v5p-16384"),
        ("v7-8", "the nearest is v6e-8"),
        ("8xv5p", "write v5p-16"),
        ("h100", "such as 16xh100"),
    ]:
        with pytest.raises(ValueError, match=f"^cluster={text} .*{nearest}") as error:
            cluster(text)
        assert "\n" not in str(error.value)


def test_rates_are_those_that_utilisation_is_measured_by():
    for name, kind in (("h100", "NVIDIA H100 80GB HBM3"), ("b200", "NVIDIA B200"), ("v5p", "TPU v5p")):
        hardware, peak = HARDWARE[name], PEAKS[kind]
        for rate in ("bandwidth", "bfloat16", "float32"):
            assert getattr(hardware, rate) == getattr(peak, rate)


def test_fractions_are_fractions_and_links_get_slower_outwards():
    for hardware in HARDWARE.values():
        for share in (hardware.infer, hardware.train, hardware.decode, hardware.collective, hardware.stream):
            assert 0 < share < 1
        assert hardware.bandwidth > hardware.link > hardware.network
        assert hardware.bandwidth > hardware.host
