#include "graphs.h"

#include <algorithm>

namespace driver {

namespace {

std::map<void*, std::shared_ptr<Graph>> graphs;
uintptr_t last_graph = 0x800000;

Status invalidate(Graph& graph, Status status, const std::string& reason) {
  graph.invalidated = reason;
  return refuse(status, "%s", reason.c_str());
}

// Runs the nodes in an order that their dependencies allow.
void run_nodes(const Graph& graph) {
  std::vector<bool> is_done(graph.nodes.size());
  for (size_t count = 0; count < graph.nodes.size(); ++count) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      const auto& after = graph.nodes[i].after;
      if (!is_done[i] &&
          std::all_of(after.begin(), after.end(), [&](size_t j) { return is_done[j]; })) {
        ready.push_back(i);
      }
    }
    size_t chosen = ready.front();
    if (policy() == Policy::newest) chosen = ready.back();
    if (policy() == Policy::random) chosen = ready[random_number() % ready.size()];
    if (graph.nodes[chosen].run) graph.nodes[chosen].run();
    is_done[chosen] = true;
  }
}

}  // namespace

void add_node(Stream* stream, std::function<void()> run) {
  Graph& graph = *stream->capture;
  std::vector<size_t>& tails = graph.tails[stream->id];
  graph.nodes.push_back({std::move(run), tails});
  tails = {graph.nodes.size() - 1};
}

Status join_capture(Stream* stream, Event* event) {
  if (!event->capture || !event->capture->is_open) {
    if (stream->capture) {
      return invalidate(*stream->capture, cudaErrorStreamCaptureIsolation,
                        "a stream that is captured cannot wait for an event from outside");
    }
    return refuse(cudaErrorStreamCaptureIsolation,
                  "the event was recorded in a capture, which has ended");
  }
  if (stream->capture && stream->capture != event->capture) {
    return invalidate(*stream->capture, cudaErrorStreamCaptureMerge,
                      "two captures cannot be merged");
  }
  stream->capture = event->capture;
  std::vector<size_t>& tails = stream->capture->tails[stream->id];
  tails.insert(tails.end(), event->nodes.begin(), event->nodes.end());
  return cudaSuccess;
}

Status begin_capture(Stream* stream, cudaStreamCaptureMode mode) {
  if (stream->is_default) {
    return refuse(cudaErrorStreamCaptureUnsupported,
                  "the legacy default stream cannot be captured");
  }
  if (stream->capture) return refuse(cudaErrorIllegalState, "the stream is being captured already");
  stream->capture = std::make_shared<Graph>();
  stream->capture->origin = stream->id;
  stream->capture->mode = mode;
  return cudaSuccess;
}

Status end_capture(Stream* stream, void** handle) {
  *handle = nullptr;
  const std::shared_ptr<Graph> graph = stream->capture;
  if (!graph) return refuse(cudaErrorIllegalState, "the stream is not being captured");
  if (graph->origin != stream->id) {
    return refuse(cudaErrorStreamCaptureUnmatched, "the capture began on another stream");
  }
  // Every stream that has joined must have been joined back.
  std::vector<bool> is_followed(graph->nodes.size());
  for (const Node& node : graph->nodes) {
    for (size_t i : node.after) is_followed[i] = true;
  }
  for (size_t i : graph->tails[stream->id]) is_followed[i] = true;
  const bool is_joined =
      std::all_of(is_followed.begin(), is_followed.end(), [](bool b) { return b; });
  graph->is_open = false;
  for_each_stream([&](Stream* other) {
    if (other->capture == graph) other->capture = nullptr;
  });
  if (!graph->invalidated.empty()) {
    return refuse(cudaErrorStreamCaptureInvalidated, "%s", graph->invalidated.c_str());
  }
  if (!is_joined) {
    return refuse(cudaErrorStreamCaptureUnjoined,
                  "work of another stream was captured, and the first stream does not wait for it");
  }
  graphs[*handle = reinterpret_cast<void*>(last_graph += 16)] = graph;
  return cudaSuccess;
}

Status instantiate(void* graph, void** executable) {
  const auto it = graphs.find(graph);
  if (it == graphs.end()) return refuse(cudaErrorInvalidValue, "%p is no graph", graph);
  graphs[*executable = reinterpret_cast<void*>(last_graph += 16)] = it->second;
  return cudaSuccess;
}

Status launch_graph(void* executable, Stream* stream) {
  const auto it = graphs.find(executable);
  if (it == graphs.end()) return refuse(cudaErrorInvalidValue, "%p is no graph", executable);
  enqueue(stream, "graph", [graph = it->second] { run_nodes(*graph); });
  return cudaSuccess;
}

Status destroy_graph(void* graph) {
  if (graphs.erase(graph)) return cudaSuccess;
  return refuse(cudaErrorInvalidValue, "%p is no graph", graph);
}

Status refuse_if_captured(Stream* stream, const char* call) {
  if (!stream->capture) return cudaSuccess;
  return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported,
                    std::string(call) + " is not allowed on a stream that is captured");
}

Status refuse_while_capturing(const char* call) {
  Status status = cudaSuccess;
  for_each_stream([&](Stream* stream) {
    if (status || !stream->capture || stream->capture->mode == cudaStreamCaptureModeRelaxed) return;
    status = invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported,
                        std::string(call) + " is not allowed while a stream is captured");
  });
  return status;
}

Status refuse_implicit(Stream* legacy, const char* call) {
  Status status = cudaSuccess;
  if (!legacy->is_default) return status;
  for_each_stream([&](Stream* stream) {
    if (status || !stream->capture || stream->device != legacy->device) return;
    if (!stream->is_blocking()) return;
    status = invalidate(*stream->capture, cudaErrorStreamCaptureImplicit,
                        std::string(call) +
                            " on the legacy stream would wait for a stream that is "
                            "captured");
  });
  return status;
}

}  // namespace driver
