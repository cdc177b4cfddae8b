//! Programs in communicators that are smaller than the job.

use crate::common::{delayed, threads_with, world};
use crate::matmul::{Case, Inputs, Memory};
use warplink::device::Priority;
use warplink::overlap::{Options, all_gather_matmul, matmul_reduce_scatter};

#[test]
fn programs_run_in_overlapping_groups_at_once() {
    threads_with(world(4), delayed(150), |comm| {
        if comm.world() < 4 {
            return;
        }
        let lists: [&[usize]; 3] = [&[0, 1, 2, 3], &[2, 1, 0], &[3, 1]];
        let own = lists.iter().filter(|list| list.contains(&comm.rank()));
        let groups: Vec<_> = own.map(|list| comm.subgroup(list).unwrap()).collect();
        let options = Options::default();
        // All groups are enqueued before any is waited for.
        let running: Vec<_> = groups
            .iter()
            .map(|group| {
                let executor = group.executor();
                assert_eq!(executor.world(), group.world());
                let stream = group.create_stream(Priority::Normal).unwrap();
                let case = Case::of::<f32>(group, true);
                let inputs = Inputs::<f32>::draw(&case, group.world() as u64);
                let memory = (Memory::gather(group, &case), Memory::scatter(group, &case));
                memory.0.fill(group, &case, &inputs);
                memory.1.fill(group, &case, &inputs);
                let buffers = memory.0.gather_buffers(&case);
                all_gather_matmul(&executor, &stream, &case.gather(), &options, &buffers).unwrap();
                let buffers = memory.1.scatter_buffers(&case);
                matmul_reduce_scatter(&executor, &stream, &case.scatter(), &options, &buffers)
                    .unwrap();
                (group, stream, case, inputs, memory)
            })
            .collect();
        for (group, stream, case, inputs, (gather, scatter)) in &running {
            group.synchronize(stream).unwrap();
            gather.check(group, case, inputs, "in a group");
            scatter.check(group, case, inputs, "in a group");
        }
    });
}

#[test]
fn each_group_has_a_collective_engine_of_its_own() {
    threads_with(world(4), delayed(150), |comm| {
        if comm.world() < 4 {
            return;
        }
        let lists: [&[usize]; 2] = [&[2, 0], &[3, 2, 1, 0]];
        for list in lists.iter().filter(|list| list.contains(&comm.rank())) {
            let group = comm.subgroup(list).unwrap();
            let engine = group.collective_engine().unwrap();
            let (own, all) = (
                group.alloc(64).unwrap(),
                group.alloc(64 * list.len()).unwrap(),
            );
            own.upload(&[comm.rank() as u8; 64]).unwrap();
            let stream = group.create_stream(Priority::Normal).unwrap();
            let request = warplink::device::CollectiveRequest::Collective {
                collective: warplink::device::Collective::AllGather,
                dtype: warplink::DType::U8,
                target: all.memory().clone(),
                source: own.memory().clone(),
            };
            engine.enqueue(&stream, &request).unwrap();
            group.synchronize(&stream).unwrap();
            let expected: Vec<u8> = list.iter().flat_map(|rank| [*rank as u8; 64]).collect();
            assert_eq!(all.download().unwrap(), expected);
        }
    });
}
