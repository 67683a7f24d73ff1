// The plan of one partition: what Python decided, as JSON (sparkconnector/plan.py writes it).
//
// A plan is a list of sections, which are read one after the other.  A section is a range of one
// partition of a topic: `cold` (files of the table), `hot` (a fetch from the leader), or `python`.
//
// Local invariant
//   P1  A plan of another version, or made for another build of this jar, is no plan.  Nor is one with a
//       `why`: Python writes there why it reads the whole scan itself.
package pk.reader;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.ArrayList;
import java.util.List;

final class Plan {
  static final int VERSION = 1;
  private static final ObjectMapper JSON = new ObjectMapper();

  final List<Section> sections = new ArrayList<>();

  /** One range of one partition. */
  static final class Section {
    final String kind;
    final String topic;
    final int partition;
    final long start;
    final long end;
    final JsonNode details;

    Section(JsonNode found) {
      kind = found.path("kind").asText();
      topic = found.path("topic").asText();
      partition = found.path("partition").asInt();
      start = found.path("start").asLong();
      end = found.path("end").asLong();
      details = found;
    }

    /** Where the range is read; for one that Python reads, why. */
    String inWords() {
      switch (kind) {
        case "hot":
          return "of the log";
        case "cold":
          return "of the table";
        default:
          return "through Python (" + details.path("why").asText("it decided so") + ")";
      }
    }
  }

  private Plan(JsonNode found) {
    for (JsonNode each : found.path("sections")) {
      sections.add(new Section(each));
    }
  }

  /** Returns why this jar cannot follow the plan; empty if it can (P1). */
  static String problem(String json) {
    JsonNode found;
    try {
      found = JSON.readTree(json);
    } catch (Exception cause) {
      return "its plan is not JSON";
    }
    if (found.path("v").asInt() != VERSION || found.path("sections").isEmpty()) {
      return "its plan is of version " + found.path("v").asText() + ", this jar knows " + VERSION;
    }
    String build = found.path("build").asText();
    if (!build.equals(Switch.BUILD)) {
      String why =
          "its jar is of build " + Switch.BUILD + ", the Python package expects " + build
              + " (pk jars prints the right one)";
      Switch.warnOnce(why);
      return why;
    }
    return found.path("why").asText();
  }

  /** Parses a plan that has no `problem`. */
  static Plan parse(String json) {
    try {
      return new Plan(JSON.readTree(json));
    } catch (Exception cause) {
      throw new IllegalArgumentException("not a plan", cause);
    }
  }
}
