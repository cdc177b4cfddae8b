//! Work with fixed operands, recorded into a graph of its own: launching that takes less host time than
//! enqueuing a kernel, and much less than a library call.

use crate::debug::debug_text;
use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::stream::CudaStream;
use crate::device::{Graph, PreparedLaunch, Stream};
use crate::error::Result;
use crate::sync::lock;
use std::sync::{Arc, Mutex};

/// Records work on a private stream.
#[derive(Debug)]
pub(crate) struct Recorder {
    // One recording at a time.
    stream: Mutex<Stream>,
}

impl Recorder {
    pub(crate) fn create(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self {
            stream: Mutex::new(Stream::new(CudaStream::create(gpu, false)?)),
        })
    }

    /// Records what `work` enqueues. `work` must enqueue the same each time.
    pub(crate) fn record(
        &self,
        work: impl Fn(&Stream) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Arc<dyn PreparedLaunch>> {
        let stream = lock(&self.stream);
        stream.begin_capture()?;
        let enqueued = work(&stream);
        let graph = stream.end_capture();
        enqueued?;
        Ok(Arc::new(RecordedGemm {
            graph: Some(graph?),
            work,
        }))
    }

    /// The same without a graph, for work whose graph would hold much scratch memory.
    pub(crate) fn unrecorded(
        work: impl Fn(&Stream) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<dyn PreparedLaunch> {
        Arc::new(RecordedGemm { graph: None, work })
    }
}

/// Work and its graph.
struct RecordedGemm<W> {
    // Dropped before the work, whose memory it uses.
    graph: Option<Graph>,
    work: W,
}

impl<W: Fn(&Stream) -> Result<()> + Send + Sync> PreparedLaunch for RecordedGemm<W> {
    fn enqueue(&self, stream: &Stream) -> Result<()> {
        match &self.graph {
            // While capturing, enqueue the work itself: graph launches do not nest.
            Some(graph) if !stream.is_capturing()? => graph.launch(stream),
            _ => (self.work)(stream),
        }
    }
}

debug_text!(RecordedGemm<W>, |it| "Recorded({:?})", it.graph);
