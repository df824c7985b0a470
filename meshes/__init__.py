"""Device meshes, sharding layouts and the transfers between them."""

from jrlhf.meshes.cost import ReshardCost as ReshardCost
from jrlhf.meshes.cost import reshard_cost as reshard_cost
from jrlhf.meshes.cost import tree_reshard_cost as tree_reshard_cost
from jrlhf.meshes.graph import Call as Call
from jrlhf.meshes.graph import Graph as Graph
from jrlhf.meshes.layout import GENERATE as GENERATE
from jrlhf.meshes.layout import SCORE as SCORE
from jrlhf.meshes.layout import TRAIN as TRAIN
from jrlhf.meshes.layout import TRAIN_TP as TRAIN_TP
from jrlhf.meshes.layout import Layout as Layout
from jrlhf.meshes.layout import ShardingRules as ShardingRules
from jrlhf.meshes.layout import gather as gather
from jrlhf.meshes.mesh import AXES as AXES
from jrlhf.meshes.mesh import make_mesh as make_mesh
from jrlhf.meshes.reshard import reshard as reshard
from jrlhf.meshes.transfer import gathered as gathered
from jrlhf.meshes.transfer import lies_elsewhere as lies_elsewhere
from jrlhf.meshes.transfer import to_devices as to_devices
from jrlhf.meshes.transfer import to_host as to_host
from jrlhf.meshes.transfer import transfer as transfer
