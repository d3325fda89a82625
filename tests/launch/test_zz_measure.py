import time
from launch.test_submit import *
from launch.conftest import *
@pytest.mark.slurm
def test_measure(slurm, tmp_path):
    for member in (False, True):
        spec = spec_of(both(slurm, member)); f = sweep(tmp_path / f"m{member}", spec, 100)
        t = time.time(); b = submit(f, spec, f.sweep().runs, quiet); t1 = time.time() - t
        finish(slurm, f, 120)
        print("member", member, "submit", round(t1,2), "all done", round(time.time()-t,1), [(x.cluster, len(x.slots)) for x in b])
        assert starts(f) == names(f.sweep().runs)
